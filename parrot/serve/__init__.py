"""ServeCore: sessions of programs, their graphs of calls, and the engines that run the calls.

The modules of this folder own the state of the whole service: configuration, sessions and quotas,
reads, native functions, metrics and events. Each subfolder owns one stage of a call. ServeCore
tokenizes prompts, and does not run models."""
