"""The wire ``nvflare``: a job for an NVFlare federation that others run, and a site's kit that runs nothing else.

Nothing here starts a server. What its operator can do, and what a hardened kit takes from him, stands in
docs/how-to/nvflare.md. Only ``conductor``, ``executor`` and ``guard`` need NVFlare.
"""
