"""Run as `python -m connector.simulate`."""

import typer

from connector.simulate.command import simulate

if __name__ == "__main__":
    typer.run(simulate)
