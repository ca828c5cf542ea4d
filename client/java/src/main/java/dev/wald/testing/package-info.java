/** Servers for tests of programs that use Wald. */
package dev.wald.testing;
