from crosstie.cli.main import run

run()
