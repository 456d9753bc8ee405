"""vLLM's envelopes for what the two halves of the connector tell each other."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from connector.vllm.orders import Report, StepOrders


@dataclass
class StepMetadata(KVConnectorMetadata):
    """From the scheduler to every worker, with each step."""

    orders: StepOrders = field(default_factory=StepOrders)


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """From a worker to the scheduler; vLLM adds up those of all ranks."""

    report: Report = field(default_factory=Report)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        """Both reports as one."""
        assert isinstance(other, WorkerReport), "another connector's report would be lost here"
        return WorkerReport(self.report.merged(other.report))
