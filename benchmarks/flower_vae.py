"""FedAvg of the MLP VAE in Flower's own simulation; run by versus_flower.py in an environment that has flwr.

python benchmarks/flower_vae.py IMAGES.npy ROUNDS default|fused
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import nn
from torch.nn import functional

IMAGES, ROUNDS, ADAM = sys.argv[1], int(sys.argv[2]), sys.argv[3]


class VAE(nn.Module):
    """784-512-256-80, 40-256-512-784."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 80))
        self.decoder = nn.Sequential(nn.Linear(40, 256), nn.ReLU(), nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 784))

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        """The mean of the negative bound over a batch."""
        mean, log_variance = self.encoder(x).chunk(2, dim=1)
        output = self.decoder(mean + torch.exp(0.5 * log_variance) * torch.randn_like(mean))
        nll = functional.binary_cross_entropy_with_logits(output, x, reduction="sum")
        return (nll + 0.5 * (log_variance.exp() + mean**2 - 1 - log_variance).sum()) / len(x)


client = ClientApp()


@client.train()
def train(message: Message, context: Context) -> Message:
    """One local epoch of batches of 32, on the one thread that Ray gives a client."""
    images = np.load(IMAGES, mmap_mode="r")[int(context.node_config["partition-id"])]
    x = torch.from_numpy(np.array(images)).reshape(len(images), -1)
    model = VAE()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=ADAM == "fused")
    total = 0.0
    for index in torch.randperm(len(x)).split(32):
        optimizer.zero_grad()
        loss = model.loss(x[index].float() / 255)
        loss.backward()
        optimizer.step()
        total += loss.item() * len(index)
    metrics = MetricRecord({"loss": total / len(x), "num-examples": len(x)})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=message)


server = ServerApp()


@server.main()
def serve(grid: Grid, context: Context) -> None:  # noqa: ARG001
    """FedAvg over everybody, no evaluation."""
    nodes = len(np.load(IMAGES, mmap_mode="r"))
    strategy = FedAvg(fraction_train=1.0, fraction_evaluate=0.0, min_train_nodes=nodes, min_available_nodes=nodes)
    result = strategy.start(grid=grid, initial_arrays=ArrayRecord(VAE().state_dict()), num_rounds=ROUNDS)
    print("loss", dict(result.train_metrics_clientapp[ROUNDS])["loss"], flush=True)


if __name__ == "__main__":
    run_simulation(
        server_app=server,
        client_app=client,
        num_supernodes=len(np.load(IMAGES, mmap_mode="r")),
        backend_config={"client_resources": {"num_cpus": 1}, "init_args": {"num_cpus": 2}},
    )
