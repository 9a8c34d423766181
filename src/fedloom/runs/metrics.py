"""How the rows of metrics.jsonl are read: which keys are metrics, and whose."""

from __future__ import annotations

import re

TRAINING = "train/"  # loss terms, which are no metrics


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
