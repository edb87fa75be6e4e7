package main

import (
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/cprun/cprun/internal/lab/command"
)

func initCommand() *cobra.Command {
	o := command.InitOptions{}
	c := &cobra.Command{
		Use:   "init HF-DIR|HUB-ID [DATA]",
		Short: "write a train.yaml for your model and data",
		Long: `Prints a train.yaml that fits a model, data and machine, with a comment of why on each line, and the next
commands. DATA is as in data.path.`,
		Example: "  cprun init Qwen/Qwen3-8B chats.jsonl --to train.yaml\n" +
			"  cprun init Llama-3.2-1B \"texts/*.txt\" --gpus 8 --assume h200",
		Args: func(c *cobra.Command, args []string) error {
			switch {
			case len(args) == 0:
				return usagef("the model is missing: %s", c.UseLine())
			case len(args) > 2:
				return usagef("%s takes a model and data, got %d arguments; quote a glob: \"texts/*.txt\"", c.CommandPath(),
					len(args))
			}
			return nil
		},
		RunE: func(c *cobra.Command, args []string) error {
			o.Args = os.Args
			return finish(command.Init(args[0], strings.Join(args[1:], ""), o))
		},
	}
	deviceFlags(c.Flags(), &o.Options)
	c.Flags().StringVar(&o.To, "to", "", "`file` to write, which must not exist (default: standard output)")
	c.Flags().Lookup("nproc").Hidden = true
	c.Flags().StringVar(&o.NProc, "gpus", "auto", "processes on this or the assumed machine, `N` or auto")
	c.Flags().StringVar(&o.Assume, "assume", "", "for another machine: a `GPU` such as h200, or k=v,... as in cprun plan")
	return c
}

func configCommand() *cobra.Command {
	schema := false
	c := &cobra.Command{
		Use:     "config --schema",
		Short:   "print the JSON schema of train.yaml, for editors",
		Example: "  cprun config --schema >train.schema.json",
		Args:    noArgs,
		RunE: func(*cobra.Command, []string) error {
			if !schema {
				return usagef("--schema is missing: cprun config --schema")
			}
			return command.Schema(stdout)
		},
	}
	c.Flags().BoolVar(&schema, "schema", false, "print the schema (draft 2020-12)")
	return c
}
