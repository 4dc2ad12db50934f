"""The command `tutti` (and `tutti-sglang`, the same)."""

import typer

import tutti_sglang
from tutti_sglang.cli import bench, demo, doctor, inspect, maintain, profile, top

app = typer.Typer(
    name="tutti",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Look after the SSD tier of SGLang's KV cache. Exit codes: 0 good, 1 something was found, 2 failed, 3 refused "
    "without --yes.",
)
VERBS = (
    doctor.doctor,
    inspect.inspect,
    maintain.verify,
    maintain.gc,
    maintain.clear,
    bench.bench,
    profile.profile,
    top.top,
    demo.demo,
)
for verb in VERBS:
    app.command()(verb)


def _version(value: bool) -> None:
    if value:
        typer.echo(tutti_sglang.__version__)
        raise typer.Exit


@app.callback()
def _main(version: bool = typer.Option(False, "--version", callback=_version, is_eager=True)) -> None:
    pass


def main() -> None:
    """Entry point."""
    app()
