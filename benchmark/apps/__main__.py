from benchmark.apps.cli import main

main()
