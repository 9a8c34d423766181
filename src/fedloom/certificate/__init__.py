"""One page for a data-protection officer: what is promised to whom, in words, as HTML, PDF and JSON."""
