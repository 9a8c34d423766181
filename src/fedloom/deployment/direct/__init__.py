"""The direct wire: silos call the server by gRPC over TLS 1.3, each with a certificate of its own.

grpcio has no setting for TLS's version. But a server and a client whose certificates are of elliptic curves share no
cipher of TLS 1.2 where they offer those for RSA alone, and the ciphers of TLS 1.3 are not chosen by that list. So an
older version finds no cipher. gRPC reads the list when it is loaded, which is why it stands here; and what was agreed
upon is looked at once more with every call (``register``).
"""

import os

os.environ["GRPC_SSL_CIPHER_SUITES"] = "ECDHE-RSA-AES256-GCM-SHA384"
os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what goes wrong is said by whoever called
