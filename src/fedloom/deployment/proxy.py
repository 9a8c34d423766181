"""The door of a server: nginx speaks TLS with silos and passes on what a silo needs, and nothing else.

Flower's SuperLink has one port for silos and for control, and control calls need no credential; so it listens on
loopback alone.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from fedloom.errors import FedloomError

FLEET = (  # all that a node with a registered key calls
    "activate-node",
    "deactivate-node",
    "send-node-heartbeat",
    "pull-messages",
    "push-messages",
    "get-run",
    "push-object",
    "pull-object",
    "confirm-message-received",
)
LARGEST = 8 * 2**20  # bytes of a call: Flower cuts tensors into pieces of 5 MiB

CONFIGURATION = """\
# Silos reach the federation '{name}' here, and only by the calls that a silo needs.
worker_processes 1;
pid "{folder}/nginx.pid";
error_log "{logs}/proxy-errors.log" warn;
events {{ worker_connections 2048; }}
http {{
    access_log off;
    server_tokens off;
    client_body_temp_path "{folder}/body";
    proxy_temp_path "{folder}/proxy";
    fastcgi_temp_path "{folder}/fastcgi";
    uwsgi_temp_path "{folder}/uwsgi";
    scgi_temp_path "{folder}/scgi";
    proxy_max_temp_file_size 0;  # a worker of root's nginx may not write into the server's folder
    client_max_body_size {largest};  # and none is read here: who sends it shows its key to the SuperLink first
    client_body_buffer_size 64k;
    client_header_timeout 30s;
    client_body_timeout 60s;
    large_client_header_buffers 4 8k;
    proxy_read_timeout 300s;
    proxy_send_timeout 300s;

    upstream superlink {{  # connections are kept: Flower calls once for every piece of a message
        server 127.0.0.1:{port};
        keepalive 32;
    }}

    server {{
        listen {listen} ssl;
        ssl_certificate "{keys}/server.crt";
        ssl_certificate_key "{keys}/server.key";
        ssl_protocols TLSv1.2 TLSv1.3;

        location ~ ^/v1/fleet/({calls})$ {{
            limit_except POST {{ deny all; }}
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_set_header Host localhost;
            proxy_request_buffering off;
            proxy_pass https://superlink;
            proxy_ssl_verify on;
            proxy_ssl_trusted_certificate "{keys}/ca.crt";
            proxy_ssl_name localhost;
        }}
        location / {{ return 404; }}
    }}
}}
"""


def configuration(name: str, keys: Path, folder: Path, logs: Path, listen: str, port: int) -> str:
    """nginx's file for a federation whose SuperLink has a port on loopback."""
    return CONFIGURATION.format(
        name=name, keys=keys, folder=folder, logs=logs, listen=listen, port=port, calls="|".join(FLEET), largest=LARGEST
    )


def nginx() -> str:
    """Where the nginx program lies; a sentence about installing it, if it is not there."""
    found = shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin:/opt/homebrew/bin")
    if found is None:
        raise FedloomError("nginx is not installed; install it (Debian: nginx-light), or serve with --no-proxy")
    return found
