"""Check whether this machine can train the trading agent, and what to do if it cannot: python check_gpu_setup.py"""

from lockstep.classic.clstm_ppo.setup_check import main

if __name__ == "__main__":
    raise SystemExit(main())
