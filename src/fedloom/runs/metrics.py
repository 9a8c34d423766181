"""Metric keys: what was measured, on which features, from how many samples, of whom."""

from __future__ import annotations

import re

TRAINING = "train/"  # loss terms, which are no metrics


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


def is_metric(key: str) -> bool:
    """Metric keys have slashes; ``round``, ``seconds`` and the like have none."""
    return "/" in key and not key.startswith(TRAINING)


def split_key(key: str) -> tuple[str, str]:
    """The metric, and the group or silo that it is of (empty: everybody).

    >>> split_key("blend/domain-cnn/n1000/group=mnist")
    ('blend/domain-cnn/n1000', 'mnist')
    """
    metric, *whose = re.split(r"/(?:group|silo)=", key, maxsplit=1)
    return metric, "".join(whose)


def of_whom(key: str) -> str:
    """Whose it is, in words.

    >>> of_whom("blend/domain-cnn/n1000/group=mnist"), of_whom("blend/domain-cnn/n1000")
    ('group mnist', 'all')
    """
    found = re.search(r"/(group|silo)=", key)
    return f"{found[1]} {key[found.end() :]}" if found else "all"


def uncounted(key: str) -> str:
    """The key without its number of samples: one curve, whatever it was computed from.

    >>> uncounted("blend/domain-cnn/n1000/group=mnist")
    'blend/domain-cnn/group=mnist'
    """
    return re.sub(r"/n\d+(?=/|$)", "", key, count=1)


def family_of(key: str) -> str:
    """``<metric>/<variant>``: the key without count and owner."""
    return split_key(uncounted(key))[0]


def sample_count(key: str) -> int | None:
    """From how many samples a metric was computed, as its key says."""
    found = re.search(r"/n(\d{1,12})(?:/|$)", split_key(key)[0])
    return int(found[1]) if found else None
