"""An experiment ties data, method, engine and evaluation together, and lives through its rounds."""

from fedloom.experiment.experiment import Experiment, Run, load, resume, torch_device, train
from fedloom.experiment.lives import Life, Observer, file_name, live_together
from fedloom.experiment.states import KeptModels, restored

__all__ = [
    "Experiment",
    "KeptModels",
    "Life",
    "Observer",
    "Run",
    "file_name",
    "live_together",
    "load",
    "restored",
    "resume",
    "torch_device",
    "train",
]
