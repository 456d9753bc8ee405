"""The worker's half: each load is reported exactly once."""

from connector.client import LoadItem, LoadJob, LoadResult, SaveItem, SaveJob, SaveResult
from connector.vllm.orders import Report, SaveOrder, StepOrders
from connector.vllm.worker import WorkerSide

ITEM = SaveItem(0, 0, b"k" * 32, b"p" * 32, (1,))


class Copies:
    """A client whose results a test writes."""

    def __init__(self) -> None:
        self.saves_done: list[SaveResult] = []
        self.loads_done: list[LoadResult] = []
        self.asked: list[object] = []

    def load(self, job: LoadJob) -> None:
        self.asked.append(job)

    def save(self, job: object) -> None:
        self.asked.append(job)

    def finished_loads(self) -> list[LoadResult]:
        done, self.loads_done = self.loads_done, []
        return done

    def finished_saves(self) -> list[SaveResult]:
        done, self.saves_done = self.saves_done, []
        return done


def loading(name: str) -> tuple[Copies, WorkerSide]:
    copies = Copies()
    side = WorkerSide(copies, lambda direction: None, [0, 1])  # type: ignore[arg-type]
    side.start_loads(StepOrders(loads=(LoadJob(name, 1, 1, (b"k" * 32,), ()),)))
    return copies, side


def test_a_load_is_reported_once() -> None:
    copies, side = loading("r")
    assert side.finished_loads() == (set(), set())
    result = LoadResult("r", ok=True, failed_chunks=(), reason="", bytes_loaded=1)
    copies.loads_done = [result, result]
    assert side.finished_loads() == ({"r"}, set())
    copies.loads_done = [result]
    assert side.finished_loads() == (set(), set())


def test_a_failed_load_is_among_the_finished_and_names_its_chunks() -> None:
    copies, side = loading("r")
    copies.loads_done = [LoadResult("r", ok=False, failed_chunks=(3, 4), reason="gone", bytes_loaded=0)]
    assert side.finished_loads() == ({"r"}, {"r"})
    assert side.take_report() == Report(failed_chunks={"r": frozenset({3, 4})})
    assert side.take_report() is None


def test_a_rank_copies_only_the_groups_of_which_its_stage_has_layers() -> None:
    copies = Copies()
    side = WorkerSide(copies, lambda direction: None, [1])  # type: ignore[arg-type]
    items = (LoadItem(0, 0, (1,)), LoadItem(1, 0, (2,)))
    side.start_loads(StepOrders(loads=(LoadJob("r", 1, 1, (b"k" * 32,), items),)))
    other = SaveItem(1, 0, b"k" * 32, b"p" * 32, (1,))
    side.start_saves(StepOrders(saves=(SaveOrder(5, (ITEM, other), b""), SaveOrder(6, (ITEM,), b""))))
    asked = [job.items for job in copies.asked if isinstance(job, LoadJob | SaveJob)]
    # A job without items is asked for too: every rank reports every job.
    assert asked == [items[1:], (other,), ()]


def test_a_load_that_cannot_begin_is_reported_as_failed() -> None:
    _, side = loading("r")
    side.start_loads(StepOrders(broken_loads=("b",)))
    assert side.finished_loads() == ({"b"}, {"b"})
    assert side.finished_loads() == (set(), set())


def test_saves_are_reported_by_job_and_reports_of_ranks_add_up() -> None:
    copies, side = loading("r")
    side.start_saves(StepOrders(saves=(SaveOrder(5, (ITEM,), b""),)))
    copies.saves_done = [SaveResult(5, 1, 0, 0, 9)]
    report = side.take_report()
    assert report == Report({5: 1})
    other = Report({5: 1, 6: 1}, {"r": frozenset({1})})
    assert report.merged(other) == Report({5: 2, 6: 1}, {"r": frozenset({1})})
