package main

import (
	"github.com/spf13/cobra"

	"github.com/cprun/cprun/internal/lab/command"
)

func reportCommand() *cobra.Command {
	o := command.ReportOptions{}
	c := &cobra.Command{
		Use:   "report RUN…",
		Short: "draw one run or several, or an experiment: one HTML page that needs no network",
		Long: `Writes one HTML page of run directories, laid over one another, or of the directory
(or results.json) of an experiment: curves, throughput, memory, waits, the layout, and
one step as a timeline where log.trace_steps wrote a trace. Runs that go on, and files
that are missing or torn, are no fault; the page names them.`,
		Example: "  cprun report runs/opticks-20261120-101500\n  cprun report runs/a runs/b --out compare.html",
		Args: func(c *cobra.Command, args []string) error {
			if len(args) == 0 {
				return usagef("%s takes run directories, or that of an experiment", c.CommandPath())
			}
			return nil
		},
		RunE: func(_ *cobra.Command, args []string) error {
			o.Stdout, o.Version = stdout, versionString()
			return finish(command.Report(args, o))
		},
	}
	c.Flags().StringVar(&o.Out, "out", "", "the `file` to write (default report.html in the run; here for several)")
	c.Flags().StringVar(&o.Title, "title", "", "`text` at the top of the page (default: the names of the runs)")
	return c
}
