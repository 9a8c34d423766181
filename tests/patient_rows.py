"""A small table with a column of each kind, as metrics see it."""

from __future__ import annotations

import numpy as np

from fedloom.modalities.schema import Numbers, Schema

SCHEMA = Schema.of(
    {
        "target": "ill",
        "columns": {
            "age": {"kind": "integer", "bounds": [0, 100], "bins": 5},
            "weight": {"kind": "continuous", "bounds": [0.0, 200.0], "bins": 4, "null": True},
            "ward": {"kind": "categorical", "levels": ["a", "b", "c"], "null": True},
            "stage": {"kind": "ordinal", "levels": ["i", "ii", "iii", "iv"]},
            "ill": {"kind": "categorical", "levels": ["no", "yes"]},
        },
    }
)


def rows(count: int, seed: int = 0) -> Numbers:
    """Ages from 0 to 99, weights that follow them, wards by age, stages by ward, and illness by both."""
    draw = np.random.default_rng(seed)
    age = draw.integers(0, 100, count).astype(float)
    weight = np.where(draw.random(count) < 0.1, np.nan, 40 + age + 5 * draw.standard_normal(count)).clip(0, 200)
    ward = np.where(draw.random(count) < 0.05, np.nan, np.minimum(age // 34, 2))
    stage = np.clip(np.nan_to_num(ward) + draw.integers(0, 2, count), 0, 3)
    ill = (age + 30 * stage + 20 * draw.standard_normal(count) > 90).astype(float)
    return np.stack([age, weight, ward, stage, ill], axis=1)
