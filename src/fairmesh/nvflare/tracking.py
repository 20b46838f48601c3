"""Writes the measurements of all sites to NVFlare's tracking, from where its receivers at the server take them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from fairmesh.trackers.base import FinalTable, Status, TrackedReplica, Tracker

EVENT = "fed.analytix_log_stats"


@dataclass
class Analytics(Tracker):
    """Sends every number that other trackers write as NVFlare's analytics: a metric of each site, over sites, the
    weights and the bytes.

    Args:
        context: NVFlare's context of this site.
    """

    context: Any = field(repr=False)

    extra: ClassVar[str] = "nvflare"

    def load(self) -> None:
        import nvflare  # noqa: F401

    def open(self, replica: TrackedReplica, folder: Path, alone: bool) -> None:
        from nvflare.apis.fl_component import FLComponent

        replica.handle = FLComponent()

    def write(self, replica: TrackedReplica, round: int, numbers: Mapping[str, float]) -> None:
        from nvflare.apis.analytix import AnalyticsDataType
        from nvflare.apis.utils.analytix_utils import create_analytic_dxo, send_analytic_dxo

        for name, number in numbers.items():
            value = create_analytic_dxo(name, number, AnalyticsDataType.SCALAR, global_step=round)
            with self.context.get_engine().new_context() as own:
                send_analytic_dxo(replica.handle, value, own, EVENT, fire_fed_event=True)

    def write_result(
        self, replica: TrackedReplica, round: int, intervals: Mapping[str, float], table: FinalTable
    ) -> None:
        self.write(replica, round, intervals)

    def close(self, replica: TrackedReplica, status: Status) -> None:
        pass
