package main

import (
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/cprun/cprun/internal/model/backends"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/run/bench"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/ring"
)

// words lists the values of flags that take one of a few words.
var words = map[string][]string{
	"algorithm": append(slices.Clone(ring.Algorithms), "auto"),
	"backend":   {backends.Flash.String(), backends.Fused.String(), "reference", "auto"},
	"calls":     bench.Calls,
	"device":    {"auto", "cpu", "cuda"},
	"dtype":     {"auto", "bf16", "fp16", "fp32"},
	"gather":    ring.Gathers,
	"layout":    append(slices.Clone(partition.Names), "auto"),
	"log-level": {"error", "warn", "info", "debug"},
	"nproc":     {"auto"},
}

// completes adds shell completion to a command and its subcommands: configs and runs as arguments, words of
// flags, and keys of --set.
func completes(root *cobra.Command) {
	root.InitDefaultCompletionCmd()
	for _, c := range root.Commands() {
		if c.Name() == "completion" {
			c.Short = "print a script for bash, zsh, fish or powershell that completes commands, flags and values"
			c.Example = "  source <(cprun completion bash)"
			for _, shell := range c.Commands() {
				shell.Example = "  cprun completion " + shell.Name()
			}
		}
	}
	completeAll(root)
}

func completeAll(c *cobra.Command) {
	if c.ValidArgsFunction == nil {
		switch arg := strings.TrimPrefix(c.Use, c.Name()+" "); {
		case strings.HasSuffix(arg, ".yaml"):
			c.ValidArgsFunction = cobra.FixedCompletions([]string{"yaml", "yml"}, cobra.ShellCompDirectiveFilterFileExt)
		case strings.Contains(arg, "RUN"):
			c.ValidArgsFunction = cobra.FixedCompletions(nil, cobra.ShellCompDirectiveFilterDirs)
		}
	}
	c.LocalNonPersistentFlags().VisitAll(func(f *pflag.Flag) {
		var err error
		switch list, ok := words[f.Name]; {
		case ok && f.Value.Type() != "bool":
			err = c.RegisterFlagCompletionFunc(f.Name, cobra.FixedCompletions(list, cobra.ShellCompDirectiveNoFileComp))
		case f.Name == "set":
			err = c.RegisterFlagCompletionFunc(f.Name, func(_ *cobra.Command, _ []string, prefix string) ([]string,
				cobra.ShellCompDirective) {
				return config.Completions(prefix), cobra.ShellCompDirectiveNoSpace | cobra.ShellCompDirectiveNoFileComp
			})
		}
		if err != nil {
			panic("cprun: completion of --" + f.Name + ": " + err.Error())
		}
	})
	for _, sub := range c.Commands() {
		completeAll(sub)
	}
}
