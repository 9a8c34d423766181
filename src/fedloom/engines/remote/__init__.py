"""Where it runs for real: silos in processes and on machines of their own, whatever wire reaches them."""
