from fairmesh.cli import main

main()
