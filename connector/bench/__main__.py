"""Run as `python -m connector.bench copy` or `lookup`."""

import typer

from connector.bench.command import copy, lookup

if __name__ == "__main__":
    app = typer.Typer()
    app.command()(copy)
    app.command()(lookup)
    app()
