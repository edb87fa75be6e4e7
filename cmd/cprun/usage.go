package main

import (
	"cmp"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/cprun/cprun/internal/model/config"
)

// knownConfig tells a mistyped command from a config that is not there.
func knownConfig(c *cobra.Command, arg string) error {
	if _, err := os.Stat(arg); err == nil || filepath.Ext(arg) != "" || strings.ContainsRune(arg, filepath.Separator) {
		return nil // whether it can be read is found with the other faults of the config
	}
	names := append(commandsOf(c), trainingWords...)
	switch meant := config.Nearest(arg, names); {
	case slices.Contains(trainingWords, meant):
		return usagef("%q is no command: training takes none, cprun [flags] train.yaml", arg)
	case slices.Contains(unbuiltCommands, arg):
		return usagef("the command %s is not in this build", arg)
	case meant != "":
		return usagef("%q is neither a config nor a command; did you mean %s?", arg, meant)
	}
	return usagef("%q is neither a config nor a command; the commands are %s", arg, strings.Join(commandsOf(c), ", "))
}

// trainingWords are what other programs call the command that trains.
var trainingWords = []string{"train", "run", "launch"}

// unbuiltCommands and unbuiltFlags are planned and not in this build.
var (
	unbuiltCommands = []string{"verify"}
	unbuiltFlags    = []string{"verify", "chat", "logprobs", "merge"}
)

// commandsOf lists the commands that users have.
func commandsOf(c *cobra.Command) (names []string) {
	for _, sub := range c.Commands() {
		if !sub.Hidden && sub.IsAvailableCommand() {
			names = append(names, sub.Name())
		}
	}
	return names
}

// helpCommand is that of cobra, but that what is no command is an error.
func helpCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "help [command]",
		Short:   "print the help of a command",
		Example: "  cprun help plan",
		RunE: func(c *cobra.Command, args []string) error {
			about, _, err := c.Root().Find(args)
			if err != nil || about.Hidden || len(args) > 0 && about == c.Root() {
				return usagef("%q is no command; the commands are %s", strings.Join(args, " "),
					strings.Join(commandsOf(c.Root()), ", "))
			}
			about.InitDefaultHelpFlag() // so that -h is listed
			about.InitDefaultVersionFlag()
			return about.Help()
		},
	}
}

// flagError is a wrong flag, with the one that it was probably meant to be.
func flagError(c *cobra.Command, err error) error {
	var unknown *pflag.NotExistError
	if !errors.As(err, &unknown) {
		return &usageError{err}
	}
	var names []string
	c.Flags().VisitAll(func(f *pflag.Flag) { names = append(names, f.Name) })
	given := cmp.Or(unknown.GetSpecifiedShortnames(), unknown.GetSpecifiedName())
	if slices.Contains(unbuiltFlags, given) {
		return usagef("--%s is not in this build", given)
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
