"""What the declarations of a step's ops share."""

import torch

from hemiola.plugins.spec import INT, Arg, Form

LONG = (torch.int64,)
PLAN = Arg("plan", "MC", INT)  # M = N + 1; plan.py
LENGTHS = Arg("lengths", "4S", LONG, mutated=True)
IDS = Arg("ids", "SW", INT, mutated=True)
FORMS = (Form("compiled", "cpu", lambda call: ""), Form("cuda", "cuda", lambda call: ""))
