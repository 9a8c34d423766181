"""What Flower starts at a silo for every message: it hands the message to the silo's worker and the answer back."""

from __future__ import annotations

from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedloom.deployment.link import ask_worker
from fedloom.engines.flower.messages import answered, frame_of

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Pass it on."""
    return answered(ask_worker(Path(str(context.node_config["worker"])), frame_of(message)), message)
