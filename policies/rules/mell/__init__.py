"""The paper's scheduling algorithm (MELL, section VI) as printed and repaired, one file for each operation of Fig. 10.

`policies.rules.registry` imports its two policies, and the room imports the cluster, the plan's reasons and the port of
policies. A `Cluster` with its changes comes in; `Board` indexes it, `Work` keeps an epoch's lifted units and holes, and
every decision goes back into the cluster. The two policies differ by the `Reading` of the paper's open points.
"""

from policies.rules.mell.policy import Mell, mell, mell_repaired

__all__ = ["Mell", "mell", "mell_repaired"]
