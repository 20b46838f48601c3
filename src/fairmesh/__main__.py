from fairmesh.cli.main import main

main()
