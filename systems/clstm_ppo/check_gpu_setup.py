"""Check whether this machine is ready to train the trading agent: python check_gpu_setup.py"""

from lockstep.recipes.clstm_ppo.gpu_setup import main

if __name__ == "__main__":
    raise SystemExit(main())
