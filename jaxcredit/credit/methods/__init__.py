"""The published methods, one file each: the equation, and a body that reads like it."""

from jaxcredit.credit.methods.agentprm import agentprm
from jaxcredit.credit.methods.archer import archer
from jaxcredit.credit.methods.attnsr import attnsr
from jaxcredit.credit.methods.attnsr_async import attnsr_async
from jaxcredit.credit.methods.attnsr_grpo import attnsr_grpo
from jaxcredit.credit.methods.dapo import dapo
from jaxcredit.credit.methods.dr_grpo import dr_grpo
from jaxcredit.credit.methods.ecpo import ecpo
from jaxcredit.credit.methods.empg import empg
from jaxcredit.credit.methods.flowtracer import flowtracer, flowtracer_step
from jaxcredit.credit.methods.gigpo import gigpo
from jaxcredit.credit.methods.graphgpo import graphgpo
from jaxcredit.credit.methods.grpo import grpo
from jaxcredit.credit.methods.hcapo import hcapo
from jaxcredit.credit.methods.hgpo import hgpo
from jaxcredit.credit.methods.istar import istar
from jaxcredit.credit.methods.linear import linear
from jaxcredit.credit.methods.poad import poad
from jaxcredit.credit.methods.ppo import ppo
from jaxcredit.credit.methods.procredit import procredit
from jaxcredit.credit.methods.reinforce_pp import reinforce_pp
from jaxcredit.credit.methods.relace import relace
from jaxcredit.credit.methods.rloo import rloo
from jaxcredit.credit.methods.rudder import rudder
from jaxcredit.credit.methods.spa_rl import spa_rl
from jaxcredit.credit.methods.tarl import tarl
from jaxcredit.credit.methods.verl_agent import verl_agent_gigpo, verl_agent_grpo
from jaxcredit.credit.methods.vineppo import vineppo

__all__ = [
    "agentprm",
    "archer",
    "attnsr",
    "attnsr_async",
    "attnsr_grpo",
    "dapo",
    "dr_grpo",
    "ecpo",
    "empg",
    "flowtracer",
    "flowtracer_step",
    "gigpo",
    "graphgpo",
    "grpo",
    "hcapo",
    "hgpo",
    "istar",
    "linear",
    "poad",
    "ppo",
    "procredit",
    "reinforce_pp",
    "relace",
    "rloo",
    "rudder",
    "spa_rl",
    "tarl",
    "verl_agent_gigpo",
    "verl_agent_grpo",
    "vineppo",
]
