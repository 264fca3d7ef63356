"""`lockstep verify`: does a task train the same model in every layout, and if not, why?"""
