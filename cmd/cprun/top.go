package main

import (
	"os"

	"github.com/spf13/cobra"

	"github.com/cprun/cprun/internal/lab/command"
)

func topCommand() *cobra.Command {
	o := command.TopOptions{}
	c := &cobra.Command{
		Use:   "top [RUN]",
		Short: "show a run while it goes on: loss, speed, memory, what each rank waits for, events",
		Long: `Shows a run, by what its directory holds: on a terminal as a picture that is drawn
again each second, until q or Ctrl-C; elsewhere once, as lines. It may run on another
host that shares the file system, and it changes nothing. Without RUN it shows the
newest of runs/.`,
		Example: "  cprun top runs/opticks-20261120-101500\n  cprun top --once",
		Args: func(c *cobra.Command, args []string) error {
			if len(args) > 1 {
				return usagef("%s takes one run directory, got %q", c.CommandPath(), args)
			}
			return nil
		},
		RunE: func(c *cobra.Command, args []string) error {
			dir := ""
			if len(args) > 0 {
				dir = args[0]
			}
			o.Stdout, o.Terminal = stdout, os.Stdout
			return finish(command.Top(c.Context(), dir, o))
		},
	}
	c.Flags().BoolVar(&o.Once, "once", false, "print what is known now, and end")
	return c
}
