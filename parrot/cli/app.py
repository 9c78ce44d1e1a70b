"""The subcommands and their options."""

import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from parrot.cli.bench import options as to_bench
from parrot.cli.console import OUT
from parrot.cli.journal import journal
from parrot.cli.keys import keys

DEFAULT_CORE = "http://localhost:9000"
_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def _with_hyphens(name: str) -> str:
    """An option's name with hyphens. Older scripts may use underscores."""
    return name.replace("_", "-")


app = typer.Typer(
    no_args_is_help=True,
    context_settings={"token_normalize_func": _with_hyphens},
    pretty_exceptions_enable=False,
    help="Run and inspect Parrot, an inference server for LLM applications.",
)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        from parrot.utils.installation import own_version

        OUT.print(f"parrot {own_version()}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Options of the command itself."""


config = typer.Typer(no_args_is_help=True, help="Show configuration settings.")
app.add_typer(config, name="config")
app.add_typer(keys, name="keys")
app.add_typer(journal, name="journal")

CoreOption = Annotated[str, typer.Option("--core", envvar="PARROT_URL", help="Server URL.")]
CoreConfigOption = Annotated[
    Path | None,
    typer.Option("--config-path", help="Config file of ServeCore, for its cluster token."),
]
ApiKeyOption = Annotated[
    str | None,
    typer.Option("--api-key", envvar="PARROT_KEY", help="API key, if the server has keys."),
]
ModelsArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="MODEL | URL...",
        help="The model: `embedded`, a hub id such as Qwen/Qwen3-0.6B, a folder with weights, a "
        "GGUF file, an engine's config file, or the name of a sample config. Or the URLs of "
        "servers with an OpenAI API that already run, such as http://localhost:8000/v1.",
    ),
]
ApiKeyFileOption = Annotated[
    Path | None,
    typer.Option(
        "--api-key-file",
        help="With URLs: file with the servers' API key. \\[default: OPENAI_API_KEY]",
    ),
]
TensorParallelOption = Annotated[
    int | None,
    typer.Option(
        "--tensor-parallel", min=1, help="Number of GPUs per engine (tensor parallelism)."
    ),
]
ForwardKeyOption = Annotated[
    bool,
    typer.Option(
        "--forward-client-key",
        help="With URLs: send each client's API key to the servers, instead of one key for all.",
    ),
]
CaFileOption = Annotated[
    Path | None,
    typer.Option("--ca-file", help="With URLs: certificates (PEM) to trust for https."),
]
UpLogDirOption = Annotated[
    Path | None,
    typer.Option(
        "--log-dir",
        help="Folder for the log of each process.",
        show_default="logs/PORT",
    ),
]
LogDirOption = Annotated[
    Path, typer.Option("--log-dir", help="Folder for the log of each process.")
]
ReadyTimeoutOption = Annotated[
    float, typer.Option("--ready-timeout", help="Seconds to wait for the model to load.")
]


@app.command(context_settings=_PASS_ON)
def serve(context: typer.Context) -> None:
    """Run ServeCore from a config file. `parrot serve --help` lists the options."""
    _run_server("parrot.server.http_server", "parrot serve", context.args)


@app.command(context_settings=_PASS_ON)
def engine(context: typer.Context) -> None:
    """Run one engine from a config file. `parrot engine --help` lists the options."""
    _run_server("parrot.engine.http_server", "parrot engine", context.args)


def _run_server(module: str, name: str, args: list[str]) -> None:
    sys.argv[0] = name  # The name in the help text.
    import_module(module).main(args)


@app.command()
def up(
    models: ModelsArgument,
    engines: Annotated[
        int | None,
        typer.Option(min=1, help="Number of engines. \\[default: one per GPU, or 1]"),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            min=0, max=65535, help="Port of the server. 0: any free port. \\[default: 9000]"
        ),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(help="Address to listen on. \\[default: 127.0.0.1, this machine only]"),
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:N.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="auto, float32, float16, bfloat16 or fp8.")
    ] = None,
    tensor_parallel: TensorParallelOption = None,
    core_config: Annotated[
        Path | None, typer.Option("--core-config", help="Config file of ServeCore.")
    ] = None,
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure",
            help="Disable authentication. Anyone who can reach the port can use the server.",
        ),
    ] = False,
    api_key_file: ApiKeyFileOption = None,
    forward_client_key: ForwardKeyOption = False,
    ca_file: CaFileOption = None,
    log_dir: UpLogDirOption = None,
    ready_timeout: ReadyTimeoutOption = 1800.0,
) -> None:
    """Serve a model on this machine, or put Parrot in front of servers that already run. Stop it
    with Ctrl-C."""
    from parrot.cli.up import UpOptions
    from parrot.cli.up import up as serve_model

    options = UpOptions(
        engines=engines,
        host=host,
        port=port,
        device=device,
        dtype=dtype,
        core_config=core_config,
        insecure=insecure,
        log_dir=log_dir,
        ready_timeout_s=ready_timeout,
        tensor_parallel=tensor_parallel,
        api_key_file=api_key_file,
        forward_client_key=forward_client_key,
        ca_file=ca_file,
    )
    serve_model(models, options)


@config.command("show")
def config_show(
    file: Annotated[
        Path | None,
        typer.Argument(help="Config file of ServeCore or of an engine. \\[default: none]"),
    ] = None,
    host: Annotated[str | None, typer.Option(help="Show the config with this `host`.")] = None,
    port: Annotated[int | None, typer.Option(help="Show the config with this `port`.")] = None,
    only_set: Annotated[
        bool, typer.Option("--only-set", help="Hide settings that have their default.")
    ] = False,
) -> None:
    """Show every setting with its value and its source."""
    from parrot.cli.config_show import show_config

    given = {"host": host, "port": port}
    show_config(file, {key: value for key, value in given.items() if value is not None}, only_set)


@app.command()
def launch(
    configs: Annotated[
        list[Path] | None,
        typer.Argument(help="Config files of ServeCore and engines, or a launch file."),
    ] = None,
    log_dir: LogDirOption = Path("logs"),
    ready_timeout: ReadyTimeoutOption = 1800.0,
    ray: Annotated[bool, typer.Option("--ray", help="Run the servers on a Ray cluster.")] = False,
    address: Annotated[
        str, typer.Option(help="With --ray: address of the cluster, auto or ray://HOST:PORT.")
    ] = "auto",
    name: Annotated[str, typer.Option(help="With --ray: name of the service.")] = "parrot",
    detach: Annotated[
        bool, typer.Option("--detach", help="With --ray: exit when all servers are ready.")
    ] = False,
    stop: Annotated[bool, typer.Option("--stop", help="With --ray: stop the service.")] = False,
) -> None:
    """Run ServeCore and engines from config files, until Ctrl-C. Engines that die are
    restarted."""
    from parrot.cli import launch as launchers

    paths = configs or []
    launchers.refuse_inventories(paths)
    if (detach or stop) and not ray:
        raise typer.BadParameter("--detach and --stop need --ray")
    if bool(paths) == stop:
        raise typer.BadParameter("config files are needed, or --stop without any")
    if not ray:
        launchers.launch_and_wait(paths, log_dir, ready_timeout)
    elif stop:
        launchers.stop_on_ray(address, name)
    else:
        options = launchers.RayOptions(address, name, detach, ready_timeout)
        launchers.launch_on_ray(paths, options)


@app.command(context_settings={"allow_extra_args": True, "allow_interspersed_args": False})
def run(
    context: typer.Context,
    program: Annotated[Path, typer.Argument(help="A Python program that uses parrot.")],
    core: CoreOption = DEFAULT_CORE,
    embedded: Annotated[
        bool,
        typer.Option("--embedded", help="Start a server with the included model if none answers."),
    ] = False,
) -> None:
    """Run a Python program with its arguments against a server."""
    from parrot.cli.run import run_program

    run_program(program, context.args, core, embedded)


@app.command()
def ping(core: CoreOption = DEFAULT_CORE, config_path: CoreConfigOption = None) -> None:
    """Show whether a server answers, and its models. With --config-path, also its engines."""
    from parrot.cli.run import show_health

    show_health(core, config_path)


@app.command()
def page(
    core: CoreOption = DEFAULT_CORE,
    config_path: CoreConfigOption = None,
) -> None:
    """Print the address of the web page of a server, with a key to sign in."""
    from parrot.cli.run import show_page_address

    show_page_address(core, config_path)


@app.command()
def chat(
    question: Annotated[
        str | None,
        typer.Argument(help="Ask one question and exit. Without it, start a chat."),
    ] = None,
    core: CoreOption = DEFAULT_CORE,
    model: Annotated[str | None, typer.Option(help="Model. \\[default: the first]")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    api_key: ApiKeyOption = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=1, help="Maximum number of tokens per answer.")
    ] = 1024,
    temperature: Annotated[
        float | None,
        typer.Option(min=0.0, max=2.0, help="Sampling temperature. \\[default: the model's]"),
    ] = None,
) -> None:
    """Talk to a model, through the OpenAI-compatible API."""
    from parrot.cli.chat import chat as talk

    talk(core, model, question, system, api_key, max_tokens, temperature)


@app.command()
def top(
    core: CoreOption = DEFAULT_CORE,
    config_path: CoreConfigOption = None,
    api_key: ApiKeyOption = None,
    once: Annotated[bool, typer.Option("--once", help="Print once and exit.")] = False,
) -> None:
    """Show engines and applications of a server, live. Press q to quit."""
    from parrot.cli.top import top as watch

    watch(core, config_path, api_key, once)


@app.command()
def trace(
    session: Annotated[
        str | None, typer.Argument(help="Session id, or `last`. Without it, list the sessions.")
    ] = None,
    core: CoreOption = DEFAULT_CORE,
    config_path: CoreConfigOption = None,
    api_key: ApiKeyOption = None,
    file: Annotated[
        Path | None,
        typer.Option(help="Read the session from a recorded trace file (`trace_path`)."),
    ] = None,
    output_dir: Annotated[
        Path, typer.Option("--output-dir", help="Folder for the files.")
    ] = Path(),
) -> None:
    """Export a session as a Perfetto trace and an SVG graph."""
    from parrot.cli.trace import trace as write_trace

    write_trace(session, core, config_path, api_key, file, output_dir)


@app.command()
def bench(
    url: to_bench.Url = DEFAULT_CORE,
    workload: to_bench.WorkloadName = "requests",
    against: to_bench.Against = None,
    num_requests: to_bench.NumRequests = None,
    prompt_tokens: to_bench.PromptTokens = None,
    prefix_tokens: to_bench.PrefixTokens = None,
    output_tokens: to_bench.OutputTokens = None,
    concurrency: to_bench.Concurrency = None,
    request_rate: to_bench.RequestRate = None,
    chat: to_bench.Chat = False,
    model: to_bench.Model = None,
    against_model: to_bench.AgainstModel = None,
    api_key: ApiKeyOption = None,
    against_api_key: to_bench.AgainstKey = None,
    repeat: to_bench.Repeat = 1,
    seed: to_bench.Seed = None,
    timeout: to_bench.Timeout = 600.0,
    output: to_bench.Output = None,
) -> None:
    """Measure a server, and compare it with another OpenAI-compatible server."""
    from parrot.cli.bench.command import BenchOptions
    from parrot.cli.bench.command import bench as measure

    options = BenchOptions(
        workload=workload,
        against=against or [],
        num_requests=num_requests,
        prompt_tokens=prompt_tokens,
        prefix_tokens=prefix_tokens,
        output_tokens=output_tokens,
        is_chat=chat,
        model=model,
        against_model=against_model,
        api_key=api_key,
        against_api_key=against_api_key,
        concurrency=concurrency,
        request_rate=request_rate,
        repeat=repeat,
        seed=seed,
        timeout_s=timeout,
        output=output,
    )
    measure(url, options)


@app.command()
def doctor(
    configs: Annotated[
        list[Path] | None, typer.Argument(help="Config files to check as well.")
    ] = None,
) -> None:
    """Find problems of this machine and of config files, with a fix for each."""
    from parrot.cli.doctor import doctor as examine

    examine(configs or [])


@app.command()
def demo(
    file: Annotated[
        Path | None, typer.Argument(help="UTF-8 text file. \\[default: a text about bees]")
    ] = None,
    max_parts: Annotated[
        int,
        typer.Option("--max-parts", help="Maximum number of parts of the text. 0: all parts."),
    ] = 6,
    output_dir: Annotated[
        Path, typer.Option("--output-dir", help="Folder for the pictures of the graph.")
    ] = Path("demo_output"),
) -> None:
    """Summarize a text with a map-reduce on this machine, and show what happens."""
    from parrot.cli.demo.command import run_demo

    run_demo(file, max_parts, output_dir)


@app.command()
def simulate(
    trace: Annotated[Path, typer.Argument(help="Trace file of a ServeCore (`trace_path`).")],
    policy: Annotated[str | None, typer.Option(help="Policy of the global scheduler.")] = None,
    engines: Annotated[
        int | None, typer.Option(help="Number of engines. \\[default: as recorded]")
    ] = None,
    kv_tokens: Annotated[
        int | None,
        typer.Option("--kv-tokens", help="KV tokens of each engine. \\[default: as recorded]"),
    ] = None,
    engine_config: Annotated[
        Path | None,
        typer.Option("--engine-config", help="Step costs: sample_configs/engine/sim_*.json."),
    ] = None,
    core_config: Annotated[
        Path | None,
        typer.Option("--core-config", help="ServeCore config to take `global_scheduler` from."),
    ] = None,
    against: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE,...",
            help="Replay again with these changes: engines, kv_tokens, engine_config, or a key of "
            "the global scheduler. Can be repeated.",
        ),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="JSON file for the figures.")] = None,
) -> None:
    """Replay a recorded trace in virtual time with other settings, and compare."""
    from parrot.cli.simulate import simulate as run_simulation

    settings = {
        "policy": policy,
        "engines": engines,
        "kv_tokens": kv_tokens,
        "engine_config": engine_config,
    }
    run_simulation(trace, settings, core_config, against or [], output)
