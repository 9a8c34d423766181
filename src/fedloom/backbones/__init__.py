"""Public features: frozen extractors whose name says network and input resolution."""
