// Package hostile tries cprun, as a program, on inputs that somebody made to harm whoever runs it on
// them: configs, model directories, safetensors, checkpoints and run directories, token files,
// attention cases, environments, arguments, and strangers at the metrics port. Each is a process of
// its own under a limit of address space. None may panic, take more than 512 MiB or 5 seconds of
// processor time, write outside of its directory, or print what a terminal obeys; and what is refused
// must be refused in words. `make test-hostile` tries all of them, `go test` a share of each kind.
package hostile
