"""The app's two components, as Flower calls them; see ``folder`` for the description that names them."""

from __future__ import annotations

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedloom.engines.flower.messages import answered, frame_of

server = ServerApp()
client = ClientApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    """A run, where its operator lets the server's half run."""
    from fedloom.deployment.flower.conducting import conduct
    from fedloom.deployment.flower.folder import FlowerApp

    conduct(grid, FlowerApp.of(context.run_config))


@client.query()
def introduce(message: Message, context: Context) -> Message:
    """Which silo this node is, by its own word."""
    from fedloom.deployment.flower.nodes import name_frame

    return answered(name_frame(str(context.node_config.get("silo", ""))), message)


@client.train()
def work(message: Message, context: Context) -> Message:
    """A task."""
    from fedloom.deployment.flower.seat import answer_at

    return answered(answer_at(context.node_config, context.run_config, frame_of(message)), message)
