"""pytest on the `check_*.py` files beside this one, inside the vLLM environment: `python run_checks.py [ARGUMENT...]`.

That environment holds what vLLM needs and no test runner. pytest comes from the test environment, whose packages are
put last on the path, so that none of them stands in for one of vLLM's.
"""

import os
import sys
import sysconfig
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]
TEST_PACKAGES = sysconfig.get_path("purelib", vars={"base": str(REPOSITORY / ".venv")})


def main(arguments: list[str]) -> int:
    """Run the checks that the arguments name, all of them by default."""
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    sys.path.append(TEST_PACKAGES)
    import pytest

    named = [argument for argument in arguments if argument.split("::")[0].endswith(".py")]
    files = [] if named else sorted(str(path) for path in Path(__file__).parent.glob("check_*.py"))
    # vLLM and torch warn of their own parts; what Pagewarden does wrong fails an assertion.
    options = ["-p", "pytest_timeout", "--override-ini=filterwarnings=default", "--disable-warnings"]
    return int(pytest.main([*options, "--rootdir", str(REPOSITORY), *arguments, *files]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
