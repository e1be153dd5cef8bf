EPLB_POLICIES = {"default": None}
