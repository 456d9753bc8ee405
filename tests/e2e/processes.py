"""Real processes of a scenario: the daemon, engines and API servers, each ended by its own pid, each with a log."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
PAGEWARDEN = REPOSITORY / ".venv" / "bin" / "pagewarden"
VLLM_PYTHON = Path(os.environ.get("PAGEWARDEN_E2E_PYTHON", REPOSITORY / ".venv-e2e" / "bin" / "python"))
ENGINE_MAIN = Path(__file__).with_name("engine_main.py")
LOG_TAIL_BYTES = 6000
POLL_SECONDS = 0.05

VLLM_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "OMP_NUM_THREADS": "1",
}


def free_port() -> int:
    """A TCP port of the loopback interface that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Poll until the condition holds; `what` names it in the failure."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not happen within {seconds:g} s")
        time.sleep(POLL_SECONDS)


def get_json(url: str, token: str = "") -> tuple[int, Any]:
    """Status code and decoded body of a GET, with an API token where one is given; (0, None) while nothing answers."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=5) as reply:
            return reply.status, json.loads(reply.read() or b"null")
    except urllib.error.HTTPError as error:
        body = error.read()
        with contextlib.suppress(ValueError):
            return error.code, json.loads(body)
        return error.code, None
    except OSError:
        return 0, None


class LoggedProcess:
    """A child process whose output goes to a file that a failure shows."""

    def __init__(self, name: str, log: Path) -> None:
        self.name = name
        self.log = log
        self._process: subprocess.Popen[bytes] | None = None

    def spawn(self, command: Sequence[str | Path], environment: dict[str, str] | None = None) -> None:
        """Start the child in a process group of its own."""
        assert self._process is None, f"{self.name} already runs: its pid would be lost"
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {})},
                cwd=self.log.parent,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """The child's pid."""
        assert self._process is not None, f"{self.name} was not started"
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the child was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def wait(self, seconds: float) -> int:
        """Wait for the child's end and give its exit status."""
        assert self._process is not None, f"{self.name} was not started"
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} still runs after {seconds:g} s\n{self.tail()}") from None

    def kill(self) -> None:
        """SIGKILL the child alone, as the kernel's memory killer would, and reap it."""
        assert self._process is not None, f"{self.name} was not started"
        self._process.kill()
        self._process.wait(30)
        self._process = None

    def stop(self, seconds: float = 30.0) -> int | None:
        """End the child and its process group; give its exit status, None if it was not running."""
        if self._process is None:
            return None
        process, self._process = self._process, None
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(seconds)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)
        return process.returncode

    def tail(self) -> str:
        """The end of the log, for a failure's message."""
        text = self.log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace") if self.log.exists() else ""
        return f"--- end of {self.log} ---\n{text}"


class Daemon(LoggedProcess):
    """`pagewarden server` with ports, an arena directory and a catalog of its own.

    These scenarios check what becomes of a state that was asked for, so by default the policy asks for the same boundaries
    whatever traffic it has seen: where the prompt parted, and its last. Which ones the default policy would rather have
    is test_retention.py's matter; each further one cuts a prefill and so changes its last bits.
    """

    def __init__(
        self,
        directory: Path,
        *,
        chunk_tokens: int = 256,
        eviction_policy: str = "SIMPLE",
        arguments: Sequence[str] = (),
    ) -> None:
        super().__init__("pagewarden server", directory / "daemon.log")
        self.port = free_port()
        self.http_port = free_port()
        self.arena = Path(tempfile.mkdtemp(prefix="pagewarden-e2e-", dir="/dev/shm"))
        self._catalog = directory / "catalog.sqlite"
        self._run_dir = directory / "run"
        self._token = ""
        self._chunk_tokens = chunk_tokens
        self._arguments = ("--eviction-policy", eviction_policy, *arguments)

    @property
    def url(self) -> str:
        """Where the web process listens."""
        return f"http://127.0.0.1:{self.http_port}"

    def start(self) -> None:
        """Start the daemon on the same ports, arena and catalog as before, and wait until it is ready."""
        # fmt: off
        self.spawn([
            PAGEWARDEN, "server", "--host", "127.0.0.1", "--port", str(self.port),
            "--http-host", "127.0.0.1", "--http-port", str(self.http_port),
            "--arena-dir", self.arena, "--catalog", self._catalog, "--run-dir", self._run_dir,
            "--l1-size-gb", "0.25", "--chunk-size", str(self._chunk_tokens), *self._arguments,
        ])
        # fmt: on
        try:
            until(self._ready_or_ended, 60, "readiness of the daemon")
            assert self.running, "the daemon ended"
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.tail()}") from None

    def _new_token(self) -> str:
        """An API token; it outlives restarts of the daemon, as the catalog does."""
        flags = ["--port", str(self.port), "--run-dir", self._run_dir, "--json"]
        command = [PAGEWARDEN, "token", "add", "e2e", *flags]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        return str(json.loads(done.stdout)["token"])

    def _ready_or_ended(self) -> bool:
        return not self.running or get_json(f"{self.url}/readyz")[0] == 200

    def kill(self) -> None:
        """SIGKILL the daemon; its dashboard notices and leaves its port."""
        super().kill()
        until(lambda: not _listening(self.http_port), 30, "the end of the dashboard")

    def status(self) -> dict[str, Any]:
        """The body of `/api/v1/status`."""
        if not self._token:
            self._token = self._new_token()
        code, body = get_json(f"{self.url}/api/v1/status", self._token)
        assert code == 200, f"/api/v1/status answered {code}: {body}\n{self.tail()}"
        return dict(body)

    def connector(self, **options: Any) -> dict[str, Any]:
        """vLLM's `kv_transfer_config` for this daemon; `options` are the connector's, without their prefix.

        Lookups may take long here: on a loaded machine a slow daemon must not look like a miss.
        """
        extra = {
            "pagewarden.host": "127.0.0.1",
            "pagewarden.port": self.port,
            "pagewarden.lookup_timeout_seconds": 20.0,
            "pagewarden.settle_timeout_seconds": 20.0,
        }
        extra.update({f"pagewarden.{name}": value for name, value in options.items()})
        return {
            "kv_connector": "PagewardenConnector",
            "kv_connector_module_path": "connector.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }

    def close(self) -> None:
        """Stop the daemon and remove its arena."""
        self.stop()
        shutil.rmtree(self.arena, ignore_errors=True)


class ApiServer(LoggedProcess):
    """vLLM's OpenAI server on one checkpoint."""

    def __init__(self, directory: Path, model: Path, *, block_tokens: int, connector: dict[str, Any]) -> None:
        super().__init__("vLLM's server", directory / "api_server.log")
        self.port = free_port()
        # fmt: off
        self._command: list[str | Path] = [
            VLLM_PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", model,
            "--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(self.port),
            "--enforce-eager", "--max-model-len", "4096", "--enable-prefix-caching",
            # Without it the engine's subprocess ends prefill chunks off the block boundary on a CPU.
            "--block-size", str(block_tokens), "--enable-prompt-tokens-details",
            # Left to itself it depends on the CPU's instructions, and the block size on it.
            "--mamba-ssm-cache-dtype", "float32",
            "--kv-transfer-config", json.dumps(connector),
        ]
        # fmt: on

    def start(self) -> None:
        """Start the server and wait until it is healthy."""
        self.spawn(self._command, VLLM_ENVIRONMENT)
        url = f"http://127.0.0.1:{self.port}/health"
        try:
            until(lambda: not self.running or get_json(url)[0] == 200, 180, "health of vLLM's server")
            assert self.running, "vLLM's server ended"
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.tail()}") from None

    def complete(self, prompt: str, max_tokens: int) -> dict[str, Any]:
        """One completion through curl, as a user would ask for it."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "logprobs": 3}
        # fmt: off
        answer = subprocess.run([
            "curl", "--silent", "--show-error", "--fail-with-body", "--max-time", "60",
            "--header", "content-type: application/json", "--data", json.dumps(body),
            f"http://127.0.0.1:{self.port}/v1/completions",
        ], capture_output=True, check=False, timeout=90)
        # fmt: on
        assert answer.returncode == 0, f"{answer.stdout.decode()}{answer.stderr.decode()}\n{self.tail()}"
        return dict(json.loads(answer.stdout))


@contextlib.contextmanager
def running(process: Daemon | ApiServer) -> Iterator[Any]:
    """A started process, ended in the end whatever happened."""
    try:
        process.start()
        yield process
    finally:
        if isinstance(process, Daemon):
            process.close()
        else:
            process.stop()
