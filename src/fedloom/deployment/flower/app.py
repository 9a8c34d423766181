"""The app's two components, as Flower calls them; see ``folder`` for the description that names them."""

from __future__ import annotations

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedloom.deployment.flower.messages import answered, frame_of

server = ServerApp()
client = ClientApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    """A run, where its operator lets the server's half run."""
    from fedloom.deployment.flower.folder import told_in
    from fedloom.deployment.flower.grid_wire import FlowerWire
    from fedloom.deployment.flower.nodes import KnownNodes
    from fedloom.deployment.hosted.conducting import conduct
    from fedloom.deployment.hosted.run import HostedRun

    hosted = HostedRun.of(told_in(context.run_config))
    conduct(hosted, FlowerWire(KnownNodes(grid, hosted.charter.silos)), "flwr run")


@client.query()
def introduce(message: Message, context: Context) -> Message:
    """Which silo this node is, by its own word."""
    from fedloom.deployment.flower.nodes import name_frame

    return answered(name_frame(str(context.node_config.get("silo", ""))), message)


@client.train()
def work(message: Message, context: Context) -> Message:
    """A task."""
    from fedloom.deployment.hosted.seat import Said, answer_at

    said = Said(context.node_config, "this SuperNode's --node-config")
    return answered(answer_at(said, context.run_config, frame_of(message)), message)
