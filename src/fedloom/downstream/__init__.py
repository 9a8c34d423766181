"""What follows a federation: silos train classifiers on synthetic records and their own, and mix them."""

SYNTHETIC_RECORDS = 10_000  # that a common head learns from, unless told
