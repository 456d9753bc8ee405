"""Run as `python -m connector.bench copy` or `lookup`."""

import typer

from connector.bench.command import bench

if __name__ == "__main__":
    typer.run(bench)
