"""An experiment ties data, method, engine and evaluation together, and goes through its rounds."""

from fedloom.experiment.experiment import Experiment, Run, load, resume, torch_device, train
from fedloom.experiment.run_loop import Observer, RunLoop, file_name, run_together
from fedloom.experiment.states import KeptModels, restored

__all__ = [
    "Experiment",
    "KeptModels",
    "RunLoop",
    "Observer",
    "Run",
    "file_name",
    "run_together",
    "load",
    "restored",
    "resume",
    "torch_device",
    "train",
]
