"""How a metric is named: what, on which features, from how many samples, of whom."""

from __future__ import annotations


def metric_key(metric: str, variant: str, count: int, group: str | None = None, silo: str | None = None) -> str:
    """``<metric>/<variant>/n<count>`` and, for a part of the federation, ``/group=`` or ``/silo=``.

    >>> metric_key("frechet", "efficientnet-lite0-224", 10000, group="mnist")
    'frechet/efficientnet-lite0-224/n10000/group=mnist'
    """
    if group is not None and silo is not None:
        raise ValueError(f"a metric belongs to a group or to a silo, not to both ({group}, {silo})")
    key = f"{metric}/{variant}/n{count}"
    if group is not None:
        return f"{key}/group={group}"
    return key if silo is None else f"{key}/silo={silo}"
