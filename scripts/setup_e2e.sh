#!/usr/bin/env bash
# Make (or complete) a virtual environment with a CPU build of vLLM and this checkout: setup_e2e.sh VENV_DIR
# Safe to run again: what is already there at the pinned version is left alone.
set -euo pipefail

venv=${1:?usage: setup_e2e.sh VENV_DIR}
python=${PYTHON:-python3}
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
pins=$repository/constraints/e2e.txt

"$python" - <<'CHECK'
import sys
if sys.version_info < (3, 11):
    sys.exit(f"Python 3.11 or newer is needed, this is {sys.version.split()[0]}: set PYTHON to another interpreter")
CHECK

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip=("$venv/bin/python" -m pip --quiet --disable-pip-version-check --no-input)

# torch is pinned with its local version (+cpu): a CUDA build can never satisfy it.
if ! "${pip[@]}" install --no-deps --only-binary :all: --requirement "$pins"; then
    echo "The pinned packages could not be installed. If torch was not found: PIP_EXTRA_INDEX_URL or" >&2
    echo "PIP_FIND_LINKS must name a place that has the CPU builds of torch." >&2
    exit 1
fi
"${pip[@]}" install --no-deps --editable "$repository"

# Isolated, so that the checkout's folders cannot stand in for installed packages.
"$venv/bin/python" -I - <<'CHECK'
import sys
import torch, vllm
if torch.version.cuda is not None:
    sys.exit("this torch is a CUDA build: remove the environment and run again")
print(f"vLLM {vllm.__version__} on torch {torch.__version__} is ready")
CHECK
