"""The headrace command: names its sub-commands; each lives in a module of its own and is imported when it is called."""

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from runtime.settings import Settings, SettingsError

app = typer.Typer(
    help="Headrace: LLM serving over NATS JetStream.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
models_app = typer.Typer(help="Default models.", no_args_is_help=True)
app.add_typer(models_app, name="models")
dead_app = typer.Typer(help="Work that failed its last attempt.", no_args_is_help=True)
app.add_typer(dead_app, name="dead")


@app.command()
def up(
    port: Annotated[int | None, typer.Option(help="Port of the gateway on loopback; 0 takes a free one.")] = None,
    prompt: Annotated[str | None, typer.Option(help="Answer this once, streamed to stdout, and exit.")] = None,
) -> None:
    """Start everything on this machine and serve until Ctrl-C."""
    from scripts.up import answer_once, serve

    if prompt is not None:
        raise typer.Exit(answer_once(Settings.load(), prompt))
    raise typer.Exit(serve(Settings.load(port=port)))


@app.command()
def gateway(port: Annotated[int | None, typer.Option(help="Port to listen on.")] = None) -> None:
    """Run one gateway."""
    from gateway.app import run

    raise typer.Exit(run(Settings.load(port=port)))


@app.command()
def worker(kind: Annotated[Literal["retrieval", "engine", "guardrail"], typer.Argument()]) -> None:
    """Run one worker."""
    from runtime import lifecycle
    from scripts.worker import serve_of

    raise typer.Exit(lifecycle.run(f"worker {kind}", Settings.load(), serve_of(kind)))


@app.command()
def chat(
    url: Annotated[str | None, typer.Option(help="Gateway; the one that runs on this machine if not given.")] = None,
    collection: Annotated[str | None, typer.Option(help="Answer from this collection's passages.")] = None,
) -> None:
    """Talk with the model in the terminal."""
    from scripts.chat import chat as run_chat

    raise typer.Exit(run_chat(Settings.load(), url, collection))


@app.command()
def ingest(
    path: Annotated[Path, typer.Argument(help="A text or Markdown file, or a folder of them.")],
    collection: Annotated[str, typer.Option(help="Where the passages go.")],
    tenant: Annotated[str, typer.Option()] = "default",
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Put documents into a collection for retrieval."""
    from scripts.ingest import ingest as run_ingest

    raise typer.Exit(run_ingest(Settings.load(), path, collection, tenant, as_json))


@models_app.command("pull")
def models_pull() -> None:
    """Fetch the default models, or check that they are there."""
    from scripts.models import pull

    raise typer.Exit(pull(Settings.load()))


@models_app.command("list")
def models_list() -> None:
    """Say which default models are on this machine, and where."""
    from scripts.models import show

    raise typer.Exit(show(Settings.load()))


@dead_app.command("list")
def dead_list(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """One line a letter: number, stage, request, tenant, attempts, cause."""
    from scripts.dead import list_letters

    raise typer.Exit(list_letters(Settings.load(), as_json))


@dead_app.command("show")
def dead_show(number: Annotated[int, typer.Argument(help="As headrace dead list numbers them.")]) -> None:
    """One letter as JSON, with its whole input."""
    from scripts.dead import show_letter

    raise typer.Exit(show_letter(Settings.load(), number))


@dead_app.command("replay")
def dead_replay(number: Annotated[int, typer.Argument(help="As headrace dead list numbers them.")]) -> None:
    """Send a letter's request again under a new id, which is printed."""
    from scripts.dead import replay_letter

    raise typer.Exit(replay_letter(Settings.load(), number))


def main() -> None:
    """Entry point: what is wrong is said in one line, with exit status 2 for a wrong setting."""
    from runtime.model_files import ModelFileError

    try:
        app()
    except SettingsError as error:
        print(f"headrace: {error}", file=sys.stderr)
        raise SystemExit(2) from error
    except ModelFileError as error:
        print(f"headrace: {error}", file=sys.stderr)
        raise SystemExit(1) from error


if __name__ == "__main__":
    main()
