package main

import (
	"os"

	"github.com/spf13/cobra"

	"github.com/cprun/cprun/internal/lab/command"
)

func generateCommand() *cobra.Command {
	o, prompt := command.GenerateOptions{}, ""
	c := &cobra.Command{
		Use:   "generate RUN|HF-DIR --prompt TEXT",
		Short: "print text that the model of a run or of a Hugging Face directory writes",
		Long: `Reads the prompt and writes on, token by token, to standard output: nothing else is
printed there. It computes on one device, in float32, and keeps keys and values, so
that each token costs one pass. The same seed writes the same text on the same kind of
device. The text ends at the
model's end-of-text token, after --max-tokens, or where prompt and text are as long as
the model has positions; Ctrl-C ends it with status 130.`,
		Example: "  cprun generate runs/opticks-20261120-101500 --prompt \"The Rays of Light\"\n  cprun generate " +
			"Llama-3.2-1B --prompt-file start.txt --max-tokens 400 --temperature 0\n  echo \"Let there be\" | cprun " +
			"generate Llama-3.2-1B --prompt - --seed 7 --quiet >text.txt",
		Args: oneArg("a run directory, a checkpoint or a Hugging Face directory"),
		RunE: func(c *cobra.Command, args []string) error {
			if c.Flags().Changed("prompt") {
				o.Prompt = &prompt
			}
			o.Stdin, o.Stdout, o.Stderr = os.Stdin, os.Stdout, os.Stderr
			return finish(command.Generate(c.Context(), args[0], o))
		},
	}
	f := c.Flags()
	f.StringVar(&prompt, "prompt", "", "the `text` to go on from; - reads it from standard input")
	f.StringVar(&o.PromptFile, "prompt-file", "", "the `file` to go on from, without the line break at its end")
	f.IntVar(&o.MaxTokens, "max-tokens", 200, "at most `N` new tokens")
	f.Float64Var(&o.Sampling.Temperature, "temperature", 0.8,
		"what logits are divided by; 0: the likeliest token, always")
	f.Float64Var(&o.Sampling.TopP, "top-p", 0.95,
		"draw from the smallest set of tokens of this probability; 1: from all")
	f.IntVar(&o.Sampling.TopK, "top-k", 0, "draw from the `N` likeliest tokens; 0: from all")
	f.Int64Var(&o.Sampling.Seed, "seed", 1, "of the draws")
	f.Int64Var(&o.Step, "step", 0, "the checkpoint of step `N` of a run; 0: the newest")
	f.StringVar(&o.Tokenizer, "tokenizer", "",
		"a tokenizer.json or the `directory` of one, or bytes (default: the model's own)")
	f.StringVar(&o.Device, "device", "auto", "auto, cpu or cuda")
	f.BoolVar(&o.IgnoreEOS, "ignore-eos", false, "write on behind an end-of-text token")
	f.BoolVar(&o.Echo, "echo", false, "also print the prompt")
	f.BoolVar(&o.Quiet, "quiet", false, "no statistics and notes on standard error")
	f.SortFlags = false
	return c
}
