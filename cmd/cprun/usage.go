package main

import (
	"cmp"
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/cprun/cprun/internal/base/terminal"
	"github.com/cprun/cprun/internal/model/backends"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/run/bench"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/ring"
)

// strayKey refuses a key=value among the arguments.
func strayKey(args []string) error {
	for _, arg := range args {
		if key, _, ok := strings.Cut(arg, "="); ok && slices.Contains(config.Completions(key), key+"=") {
			return usagef("%q is no argument; to override the key, write --set %s", arg, arg)
		}
	}
	return nil
}

// knownConfig distinguishes a mistyped command from a missing config.
func knownConfig(c *cobra.Command, arg string) error {
	if _, err := os.Stat(arg); err == nil || filepath.Ext(arg) != "" || strings.ContainsRune(arg, filepath.Separator) {
		return nil // the config's other checks report whether it can be read
	}
	names := append(commandsOf(c), trainingWords...)
	switch meant := config.Nearest(arg, names); {
	case slices.Contains(trainingWords, meant):
		return usagef("%q is not a command; to train: cprun [flags] train.yaml", arg)
	case meant != "":
		return usagef("%q is neither a config nor a command; did you mean %s?", arg, meant)
	}
	return usagef("%q is neither a config nor a command; the commands are %s", arg, strings.Join(commandsOf(c), ", "))
}

// trainingWords are names of the training command in other programs.
var trainingWords = []string{"train", "run", "launch"}

func commandsOf(c *cobra.Command) (names []string) {
	for _, sub := range c.Commands() {
		if !sub.Hidden && sub.IsAvailableCommand() {
			names = append(names, sub.Name())
		}
	}
	return names
}

// helpTemplates wraps the text and the flags of every command to the terminal.
func helpTemplates(root *cobra.Command) {
	cobra.AddTemplateFunc("wrap", func(text string) string {
		return strings.ReplaceAll(terminal.Wrap(strings.ReplaceAll(text, "\n", " "), terminal.Columns(), 0), "\n  ", "\n")
	})
	cobra.AddTemplateFunc("flags", func(f *pflag.FlagSet) string { return f.FlagUsagesWrapped(terminal.Columns()) })
	root.SetHelpTemplate(strings.Replace(root.HelpTemplate(), "{{. |", "{{. | wrap |", 1))
	usage := strings.NewReplacer(".LocalFlags.FlagUsages", "flags .LocalFlags", ".InheritedFlags.FlagUsages",
		"flags .InheritedFlags")
	root.SetUsageTemplate(usage.Replace(root.UsageTemplate()))
}

// helpCommand returns cobra's help command, except that unknown commands are errors.
func helpCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "help [command]",
		Short:   "print the help of a command",
		Example: "  cprun help plan",
		RunE: func(c *cobra.Command, args []string) error {
			about, _, err := c.Root().Find(args)
			if err != nil || about.Hidden || len(args) > 0 && about == c.Root() {
				return usagef("%q is not a command; the commands are %s", strings.Join(args, " "),
					strings.Join(commandsOf(c.Root()), ", "))
			}
			about.InitDefaultHelpFlag() // so that -h is listed
			about.InitDefaultVersionFlag()
			return about.Help()
		},
	}
}

var flagName = regexp.MustCompile(`--[a-z-]+`)

// flagError suggests the flag that the user probably meant.
func flagError(c *cobra.Command, err error) error {
	var unknown *pflag.NotExistError
	if !errors.As(err, &unknown) {
		return &usageError{err}
	}
	var names []string
	c.Flags().VisitAll(func(f *pflag.Flag) { names = append(names, f.Name) })
	given := cmp.Or(unknown.GetSpecifiedShortnames(), unknown.GetSpecifiedName())
	advice := config.FlagAdvice(given)
	named := flagName.FindString(advice)
	if own := slices.Contains(names, strings.ReplaceAll(given, "_", "-")); !own && advice != "" &&
		(named == "" || slices.Contains(names, named[2:])) {
		return usagef("%w; %s", err, advice)
	}
	meant := config.Nearest(given, names)
	if i := slices.IndexFunc(names, func(n string) bool { return strings.HasPrefix(n, given) }); meant == "" &&
		i >= 0 && len(given) > 1 {
		meant = names[i] // such as nproc for mpirun's np
	}
	if meant != "" {
		return usagef("%w; did you mean --%s?", err, meant)
	}
	return &usageError{err}
}

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
			c.Short = "print a shell completion script"
			c.Example = "  source <(cprun completion bash)"
			c.Args = cobra.ArbitraryArgs
			c.RunE = func(c *cobra.Command, args []string) error {
				return usagef("%s takes bash, fish, powershell or zsh, got %q", c.CommandPath(), args)
			}
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
