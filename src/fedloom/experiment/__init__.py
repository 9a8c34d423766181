"""An experiment ties data, method, engine and evaluation together, and goes through its rounds."""

from fedloom.experiment.estimation import RunEstimate, estimate
from fedloom.experiment.experiment import Experiment, Run, load, resume, torch_device, train
from fedloom.experiment.run_loop import Observer, RunLoop, run_together
from fedloom.experiment.states import KeptModels, restored
from fedloom.runs.files import file_name

__all__ = [
    "RunEstimate",
    "Experiment",
    "KeptModels",
    "RunLoop",
    "Observer",
    "Run",
    "estimate",
    "file_name",
    "run_together",
    "load",
    "restored",
    "resume",
    "torch_device",
    "train",
]
