# %% [markdown]
# # From a trace to a decision, in Python
#
# Is balancing worth it, how many redundant experts does it take, and which placement does the engine start from? This
# is the [tutorial](../tutorial.md) as a notebook, on its small trace; put your own in its place, of any format that
# eplb reads.

# %%
from pathlib import Path

from eplb_service.io.open_trace import open_trace
from eplb_service.io.trace_statistics import statistics

trace = open_trace(Path("docs/tutorial/trace.zarr"))
print(f"{trace.steps} steps x {trace.layers} layers x {trace.experts} experts, top-{trace.facts.top_k}")

# %% [markdown]
# ## What is there to win?
#
# PAR, the peak-to-average ratio, is what imbalance costs: the hottest rank over the mean rank. The floor is about what
# token sampling leaves of it whatever one does. Drift far above what sampling makes of it says that the heat really
# moves, so that a placement fitted once grows stale.

# %%
found = statistics(trace, window=128, ranks=8)
print(f"PAR in order {found.par_L.mean():.2f}, floor {found.floor_L.mean():.2f}")
print(f"drift {found.drift_L.mean():.2f}, of which sampling {found.drift_noise_L.mean():.2f}")

# %% [markdown]
# ## How would each policy have done?
#
# A replay decides as the service would, window after window, and scores each decision by the steps that *follow* it:
# with no redundant expert, and with one more slot on each of the 8 ranks.

# %%
from eplb_core.planner.settings import PlannerSettings
from eplb_service.replay.jobs import jobs_for, replay, scene_for, setups_of

setups = setups_of(windows=[128], intervals=[128], slots=[4, 5])
jobs = jobs_for(["none", "deepseek", "flashlb"], setups, PlannerSettings())
replayed = replay(trace, jobs, scene_for(ranks=8))
for policy in replayed.policies:
    print(f"{policy.label:20} PAR {policy.par_realised:.2f}")

# %%
from eplb_service.report.pictures import pictures_of

pictures = pictures_of(replayed)
pictures["par.svg"]

# %% [markdown]
# ## Decide
#
# The fewest slots whose PAR is good enough are the decision: every slot takes the memory of one expert in each layer on
# each rank. Half of what is avoidable may be a sensible bar; yours is set by what a step costs (`eplb advise`).

# %%
floor = found.floor_L.mean()
bar = floor + (found.par_L.mean() - floor) / 2
enough = [policy for policy in replayed.policies if policy.par_realised <= bar]
chosen = min(enough, key=lambda policy: (policy.setup.slots, policy.par_realised))
print(f"{chosen.policy} with {chosen.setup.slots} slots per rank")

# %%
pictures["ranks.svg"]

# %% [markdown]
# ## Take it to the engine
#
# A placement file is for a start, from the newest heat; only the service changes it while the model serves.

# %%
from tempfile import mkdtemp

from eplb_core.placement import Placement
from eplb_service import solve
from eplb_service.io.placement_file import write_placement

solution = solve(trace.heat(trace.steps - 128, trace.steps), ranks=8, slots=chosen.setup.slots)
placement = Placement(solution.phy2log, trace.experts)
out = Path(mkdtemp()) / "expert_map.json"
write_placement(out, placement, solution.log2phy, "vllm-ascend")
print(f"PAR of the last 128 steps {solution.par_before:.2f} in order, {solution.par_after:.2f} as placed")
