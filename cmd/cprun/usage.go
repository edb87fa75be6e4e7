package main

import (
	"cmp"
	"errors"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/cprun/cprun/internal/config"
)

// knownConfig tells a mistyped command from a config that is not there.
func knownConfig(c *cobra.Command, arg string) error {
	if _, err := os.Stat(arg); err == nil || filepath.Ext(arg) != "" || strings.ContainsRune(arg, filepath.Separator) {
		return nil // whether it can be read is found with the other faults of the config
	}
	return usagef("%q is neither a config nor a command; the commands are %s", arg, commandsOf(c))
}

// commandsOf lists the commands that users have.
func commandsOf(c *cobra.Command) string {
	var names []string
	for _, sub := range c.Commands() {
		if !sub.Hidden && sub.IsAvailableCommand() {
			names = append(names, sub.Name())
		}
	}
	return strings.Join(names, ", ")
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
				return usagef("%q is no command; the commands are %s", strings.Join(args, " "), commandsOf(c.Root()))
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
	if meant := config.Nearest(cmp.Or(unknown.GetSpecifiedShortnames(), unknown.GetSpecifiedName()), names); meant != "" {
		return usagef("%w; did you mean --%s?", err, meant)
	}
	return &usageError{err}
}
