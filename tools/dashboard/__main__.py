"""Write the dashboard, and the alerts as a Prometheus operator object."""

from tools.dashboard.layout import PATH, text
from tools.dashboard.operator_rules import RULES_PATH, operator_rules

PATH.write_text(text())
RULES_PATH.write_text(operator_rules())
