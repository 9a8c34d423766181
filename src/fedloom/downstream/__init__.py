"""What follows a federation: silos train classifiers on synthetic records and their own, and mix them."""
