"""ServeCore: sessions of programs, their graphs of calls, and the engines that run them.

The modules of this folder own what belongs to the service as a whole: its configuration, sessions
and their quotas, reads, native functions, metrics and events; each room below owns one fact of
a call. None of it knows a model: prompts are tokenised here, but nothing is computed."""
